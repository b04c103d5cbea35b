"""What Hydra finds of this package in every app: the search path and the torchrun launcher. Imports no torch."""
