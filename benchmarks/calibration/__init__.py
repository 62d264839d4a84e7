"""How the shipped profile of predicted times came about, and how well its predictions hold: see README.md."""
