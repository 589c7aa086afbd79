"""Which keys a query sees, as a user holds it: `BlockMask`, its builders, its lists, its picture."""
