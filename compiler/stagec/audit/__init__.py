"""Reports on artifacts for people: their content, the differences of two, and the reasons."""
