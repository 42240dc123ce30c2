"""Messages of stagec for people: errors, refusals, progress, seconds, calls."""
