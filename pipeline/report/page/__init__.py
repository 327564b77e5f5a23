"""The report of a run as one HTML file: what it shows (`document`), and its pages (web/)."""
