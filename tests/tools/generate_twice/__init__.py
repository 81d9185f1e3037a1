"""Every call of `generate` again with a `PolicyCache` that keeps all, and both compared."""
