"""Training of a speculator: text by the target, the layers fitted to it, and what they are worth."""
