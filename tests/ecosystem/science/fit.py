"""A least-squares fit with optimistix and with jaxopt, and a linear solve with lineax, as their pages have them."""

import jax
import jax.numpy as jnp
import jax.random as jr
import jaxopt
import lineax as lx
import optimistix as optx


def residuals(y, args):
    amplitude, rate = y
    times, values = args
    return amplitude * jnp.exp(-rate * times) - values


def least_squares(y0, args):
    solver = optx.LevenbergMarquardt(rtol=1e-6, atol=1e-6)
    solution = optx.least_squares(residuals, solver, y0, args)
    return solution.value, solution.stats


def least_squares_arguments():
    times = jnp.linspace(0.0, 2.0, 16)
    return (jnp.array(1.0), jnp.array(0.5)), (times, 2.5 * jnp.exp(-1.3 * times))


def least_squares_avals():
    return jax.eval_shape(least_squares_arguments)


def linear_solve(operator, vector):
    return lx.linear_solve(operator, vector, solver=lx.CG(rtol=1e-6, atol=1e-6))


def linear_solve_arguments():
    matrix = jr.normal(jr.key(0), (8, 8))
    operator = lx.MatrixLinearOperator(matrix @ matrix.T + jnp.eye(8), lx.positive_semidefinite_tag)
    return operator, jr.normal(jr.key(1), (8,))


def linear_solve_avals():
    return jax.eval_shape(linear_solve_arguments)


def ridge_reg_objective(params, l2reg, X, y):
    residuals = jnp.dot(X, params) - y
    return jnp.mean(residuals**2) + 0.5 * l2reg * jnp.dot(params, params)


def ridge(init_params, l2reg, X, y):
    solver = jaxopt.LBFGS(fun=ridge_reg_objective, maxiter=20)
    return solver.run(init_params, l2reg=l2reg, X=X, y=y)


def ridge_arguments():
    return jnp.zeros(5), jnp.array(0.1), jr.normal(jr.key(0), (20, 5)), jr.normal(jr.key(1), (20,))


def ridge_avals():
    return jax.eval_shape(ridge_arguments)
