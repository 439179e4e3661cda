"""Bundle to answers: HTTP serving and offline scoring."""
