"""Diffrax: the neural ODE of its first example, with adaptive steps and the default adjoint."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from gauntlet import Built


class Func(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.mlp(y)


class NeuralODE(eqx.Module):
    func: Func

    def __call__(self, ts, y0):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(self.func),
            diffrax.Tsit5(),
            t0=ts[0],
            t1=ts[-1],
            dt0=ts[1] - ts[0],
            y0=y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=ts),
            max_steps=64,
        )
        return solution.ys


def grad_loss(model, ti, yi):
    y_pred = jax.vmap(model, in_axes=(None, 0))(ti, yi[:, 0])
    return jnp.mean((yi - y_pred) ** 2)


def build() -> Built:
    mlp = eqx.nn.MLP(2, 2, 64, 2, activation=jax.nn.softplus, key=jax.random.key(0))
    ts = jnp.linspace(0, 2, 16)
    ys = jnp.sin(jnp.linspace(1, 2, 32)[:, None, None] * ts[:, None] + jnp.arange(2))
    args = (NeuralODE(Func(mlp)), ts, ys)

    def make_step(loss):
        optim = optax.adabelief(3e-3, eps=1e-3)
        arrays, static = eqx.partition(args[0], eqx.is_inexact_array)

        def step(ti, yi, arrays, opt_state):
            value, grads = eqx.filter_value_and_grad(loss)(eqx.combine(arrays, static), ti, yi)
            updates, opt_state = optim.update(grads, opt_state)
            return value, eqx.apply_updates(arrays, updates), opt_state

        return step, (ts, ys, arrays, optim.init(arrays))

    return Built(grad_loss, args, value_and_grad=eqx.filter_value_and_grad, make_step=make_step, rtol=1e-3)
