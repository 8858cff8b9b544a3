"""Who has the other rows and columns: ranks of one group, and how features travel between them."""
