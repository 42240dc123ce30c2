"""What people ask of artifacts: what is in them, how two differ, and why."""
