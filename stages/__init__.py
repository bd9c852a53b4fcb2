"""The application: one module a stage, the command line, and the order in which stages run."""
