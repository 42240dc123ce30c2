"""The generated parts of docs/, and the site that is made of it."""
