"""`outrider bench`: load against a pair of services, and what came of it."""
