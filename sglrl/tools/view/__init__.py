"""``sglrl view``: a local web page that shows trajectories, saved or live, token by token.

* ``rows``: one row of numbers for each trajectory, with filters and orders;
* ``store``: the trajectories of files and of a running pool;
* ``details``, ``timeline``: what the page shows of one trajectory, as JSON;
* ``watching``: follows a running pool;
* ``forks``: continues from a token, apart from the run;
* ``app``: the HTTP server; ``static`` has the page.
"""
