"""The prompts that are measured with."""

CODE_PROMPTS = (
    "Write a Python function that merges two sorted lists into one sorted list.",
    "Write a Python class for a least-recently-used cache with get and put.",
    "Write a Python function that parses a CSV line with quoted fields.",
    "Write a Python function that finds all prime numbers below n with a sieve.",
    "Write a Python function that checks whether brackets in a string are balanced.",
    "Write a Python function that computes the edit distance of two strings.",
    "Write a Python function that returns the n most common words of a text.",
    "Write a Python class for a binary search tree with insert and in-order traversal.",
    "Write a Python function that finds the shortest path in a graph given as a dictionary.",
    "Write a Python decorator that retries a function with exponential backoff.",
)
