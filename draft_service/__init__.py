"""The draft service: makes guesses ahead of the verifier and serves the edge door."""
