"""The smallest family: it guesses the next byte from the last one alone."""
