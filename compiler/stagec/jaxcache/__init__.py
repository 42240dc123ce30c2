"""JAX's compilation cache: its entries, how they are built, and why one is missed."""
