"""What an action is given and what its results are called."""
