"""A training run as a request: its cost, who carries it out, and how it resumes."""
