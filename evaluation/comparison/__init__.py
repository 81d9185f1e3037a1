"""Policies side by side on the same questions: answers, probabilities, memory and time."""
