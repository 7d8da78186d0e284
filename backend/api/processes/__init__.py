"""What every process of a server needs to know of itself and of others: what it sets up at its start, signs of life, restarts."""
