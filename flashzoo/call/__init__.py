"""What one call of `attention` asks, said once: features, problem, operands; checked, planned, traced."""
