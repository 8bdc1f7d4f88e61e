"""Reports: run folders in, tables, plots and one self-contained page out.

`load` reads run folders, `compare` makes the tables, `plots` the pictures and `page` the page.
Nothing here imports torch; only `plots` imports a plotting library.
"""
