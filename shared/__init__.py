"""What the draft service and the verifier service must agree on. It knows neither of them."""
