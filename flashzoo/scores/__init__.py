"""What a call does to its scores: a function of the caller's, traced once into a short program that kernels are made
of."""
