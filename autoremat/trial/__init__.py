"""One device put to the test: what plans predict of a GPT on it, beside what it measures."""
