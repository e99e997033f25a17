"""The console in a terminal: app, screens and widgets."""
