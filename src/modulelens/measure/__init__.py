"""Callables and inputs -> verdicts and numbers. Knows any `nn.Module`, no store."""
