"""The papers' tables and figures as experiments, and the runner that carries out their runs."""
