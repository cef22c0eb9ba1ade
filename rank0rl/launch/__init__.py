"""Start and watch ranks. Only the standard library is imported here."""
