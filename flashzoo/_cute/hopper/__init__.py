"""What any Hopper kernel in CuTe DSL needs on the device, whatever it computes."""
