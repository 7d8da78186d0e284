"""What guided decoding gets right, and what it costs."""
