"""Forecast the loss of a large run from small ones.

fit        parabolas over sizes, a law through their minima, and how sure both are
forecast   the file that a large run needs before it starts, and its comparison with the result
"""
