"""Communication hooks: what travels instead of a bucket's exact gradients. ``registry`` builds them by name."""
