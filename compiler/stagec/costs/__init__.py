"""The costs of an optimized program: its operations, the bytes that it moves, its exchanges with other devices."""
