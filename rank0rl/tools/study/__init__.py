"""Many runs: which there are, on which cores they train, and what they show."""
