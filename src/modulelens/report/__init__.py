"""Records in, text out. Knows no torch, no disk, and prints nothing itself."""
