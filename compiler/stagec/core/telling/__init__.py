"""What stagec says to a person: errors, refusals, progress, seconds, calls."""
