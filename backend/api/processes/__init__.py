"""What every process of a server needs to know of itself and of others: cores, log lines, signs of life, restarts."""
