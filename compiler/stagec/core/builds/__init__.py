"""The inputs of build actions, and the names of their results."""
