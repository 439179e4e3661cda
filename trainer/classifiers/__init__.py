"""How Ψ is made: a free row a label (`table`), or Multi-Head Encoding (`product`, `cascade`, `sampled`)."""
