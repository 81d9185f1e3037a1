"""The model of word tasks, which begins as the needle model."""
