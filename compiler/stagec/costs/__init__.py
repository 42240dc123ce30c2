"""What an optimized program costs: its operations, the bytes that it moves, its exchanges with other devices."""
