"""The verifier service: owns every request, scores guesses with the target model, keeps what it would have said."""
