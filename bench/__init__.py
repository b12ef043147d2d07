"""Measurements, each a command. They need models and time; no test runs them."""
