"""Shows records: `summary` computes the figures, `comparison` compares two sets, `tables` and `plots` show them."""
