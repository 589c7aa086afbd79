"""Which keys a query sees, as a user holds it: `BlockMask`, its lists, its picture."""
