"""Find the policies that answer best at each cost, among named methods and other compositions."""
