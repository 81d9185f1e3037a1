"""Find the compositions that answer best at each cost, among all methods and more."""
