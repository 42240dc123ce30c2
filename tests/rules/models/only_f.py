"""What only one function imports."""
