"""Numbers that several files need."""

EPS = 1e-6
TEMPERATURE = 1.0
RESIDUAL = 1.0
