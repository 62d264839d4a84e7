"""A step's bytes by a walk that adds what is live, and its seconds as one sum; of dshard it has options alone."""

from math import ceil, floor, log2

from dshard import layout

FLAGS = 16
HEADER = 64


def counted_peak(model, names, cluster):
    """The most bytes that live at one moment, by strategy names of one form: base, hybrid(k, base) or split(q)."""
    units = [_Unit(unit, name, cluster, model.num_backwards) for unit, name in zip(model.units, names, strict=True)]
    peak, last = 0, len(units) - 1
    held = model.buffer_bytes + sum(u.held for u in units)
    activations = kept = 0
    owners = OwnersWalk(model, cluster)
    held += sum(ceil(u.owned_states * owners.share) for u in units)
    is_first = model.num_backwards == 1
    arrived = 0 if is_first else sum(u.grad + u.waiting for u in units)
    for i, u in enumerate(units):
        activations += u.costs.activation_bytes
        ahead = units[i + 1].ahead if i < last else 0
        peak = max(peak, held + arrived + activations + kept + u.use + ahead + u.costs.forward_transient_bytes)
        kept += u.kept
    for i in range(last, -1, -1):
        u = units[i]
        kept -= u.kept  # counted in what it uses from here on
        flying = units[i + 1].flying if i < last else 0
        if i + 2 <= last:
            arrived += (units[i + 2].grad + units[i + 2].waiting) * is_first
            replicas = units[i + 2].among
        else:
            replicas = 0
        replicas += units[i + 3].among_late if i + 3 <= last else 0
        ahead = units[i - 1].ahead_again if i else 0
        base = held + arrived + kept + ahead
        live = base + activations + flying + replicas
        peak = max(peak, live + u.use_again + u.costs.backward_transient_bytes)
        late = u.costs.gradients_transient_bytes
        late = u.costs.backward_transient_bytes if late is None else late
        peak = max(peak, live + u.filling + late)
        arrived_slice = units[i + 1].slice_flying if i < last else 0
        peak = max(peak, live - arrived_slice + u.slicing + late)
        if i < last:  # the reduction of the unit behind it ends
            ending = units[i + 1].sums + (units[i + 2].among_late if i + 2 <= last else 0)
            peak = max(peak, base + activations + u.resting + flying + ending)
        activations -= u.costs.activation_bytes
    swapped = 0
    if last:
        arrived += (units[1].grad + units[1].waiting) * is_first
        swapped = units[1].among_late
    peak = max(peak, held + arrived + units[0].flying + units[0].sums + swapped)
    arrived += (units[0].grad + units[0].waiting) * is_first
    withins = {u.within for u in units if any(p.owner_work for p in u.costs.params)}
    peak = max([peak, *(held + arrived + owners.peak(within) for within in withins)])
    if model.steps_together:
        return max(peak, held + arrived + sum(u.in_rows + sum(u.steps) for u in units))
    in_rows = sum(u.in_rows + u.in_rows_temporaries for u in units)
    return max(peak, held + arrived + in_rows + max(max(u.steps, default=0) for u in units))


class OwnersWalk:
    """Steps of whole parameters, as a walk of one rank after the other through what it allocates and frees."""

    def __init__(self, model, cluster):
        self.params = [p for unit in model.units for p in unit.params if p.owner_work]
        self.cluster, self.num_ranks = cluster, cluster.num_ranks
        self.owners = layout.assign([p.owner_work for p in self.params], self.num_ranks)
        states = [p.numel * p.state_bytes_per_element for p in self.params]
        kept = [
            sum(n for n, owner in zip(states, self.owners, strict=True) if owner == r) for r in range(self.num_ranks)
        ]
        self.share = max(kept) / sum(kept) if sum(kept) else 0

    def rounds(self):
        """Of each, the places of its parameters, by owner."""
        mine = {}
        for place in sorted(range(len(self.params)), key=lambda i: -self.size(i)):
            known = mine.setdefault(self.owners[place], [])
            if known and sum(map(self.size, known[-1])) + self.size(place) <= layout.ROUND_BYTES:
                known[-1].append(place)
            else:
                known.append([place])
        return [
            {owner: known[number] if number < len(known) else [] for owner, known in mine.items()}
            for number in range(max(map(len, mine.values())))
        ]

    def size(self, place):
        return self.params[place].numel * self.params[place].stored_itemsize

    def peak(self, within):
        """The most bytes of any rank where parameters are cut over so many."""
        return max(self.peak_of(rank, within) for rank in range(self.num_ranks))

    def peak_of(self, rank, within):
        cluster, rounds, gloo = self.cluster, self.rounds(), self.cluster.keeps_received_rows
        is_one_host = cluster.num_ranks <= cluster.ranks_per_host
        in_place = cluster.inside.in_place is not None
        shares = within > 1 and in_place and (is_one_host or cluster.ranks_per_host % within == 0)
        replicas_share = within < self.num_ranks and in_place and is_one_host
        first, num_replicas = rank // within * within, self.num_ranks // within
        live, most = {}, 0

        def slots(members, owner):
            padded = (ceil(self.params[i].length / within) * self.params[i].index_numel for i in members.get(owner, []))
            sizes = (n * self.params[i].stored_itemsize for n, i in zip(padded, members.get(owner, []), strict=True))
            return sum(ceil(n / 16) * 16 for n in sizes)

        def among(members, start):
            return sum(slots(members, owner) for owner in range(start, start + within))

        in_all_rounds = max(2 * within * slots(members, owner) for members in rounds for owner in range(self.num_ranks))

        def total_of(members):
            return sum(slots(members, owner) for owner in range(self.num_ranks))

        def take(**given):
            nonlocal most
            live.update(given)
            most = max(most, sum(live.values()))

        def fetch(number):
            live.pop(f"unread {number - 3}", None)
            members = rounds[number]
            row, rows = 2 * among(members, first), 2 * slots(members, rank) * (within - 1 if gloo else within)
            take(**{f"in {number}": in_all_rounds if shares else row + rows * (within > 1)})

        def part_of(members):
            """What a rank puts out for its replicas, and with it what it gets where that comes padded."""
            largest = max(among(members, start) for start in range(0, self.num_ranks, within))
            if replicas_share:
                return largest
            return among(members, first) if gloo else largest * (num_replicas + 1)

        def leave(number):
            """What comes of a round goes to the shards, by way of the replicas."""
            live.pop(f"unread part {number - 1}", None)
            if within > 1:
                sent = live.pop(f"sent {number}")
                live.update({f"unread {number}": sent} if shares else {})
            if num_replicas > 1 and (within > 1 or not (gloo or replicas_share)):
                take(**{f"part {number}": part_of(rounds[number]), "all": total_of(rounds[number])})
                del live["all"]
            part = live.pop(f"part {number}", 0)
            live.update({f"unread part {number}": part} if replicas_share else {})
            live.pop(f"sent {number}", None)
            del live[f"out {number}"]

        fetch(0)
        for number, members in enumerate(rounds):
            own = members.get(rank, [])
            whole = sum(map(self.size, own))
            take(values=whole, gradients=whole)
            if not shares:
                del live[f"in {number}"]
            if number + 1 < len(rounds):
                fetch(number + 1)
            take(
                temporaries=max((self.params[i].numel * self.params[i].step_bytes_per_element for i in own), default=0)
            )
            del live["temporaries"], live["gradients"]
            live.pop(f"in {number}", None)  # the peers have read it
            if within == 1 and num_replicas > 1:
                comes_at_once = gloo or replicas_share  # else it is copied from rows that have come
                take(**{f"part {number}": part_of(members), f"out {number}": total_of(members) * comes_at_once})
            else:
                sent = in_all_rounds if shares else within * slots(members, rank)
                take(**{f"sent {number}": sent, f"out {number}": among(members, first) * (within > 1)})
            del live["values"]
            if number:
                leave(number - 1)
        leave(len(rounds) - 1)
        return most


def summed_step(options, num_backwards, *, overlaps):
    """Seconds of a step by the formula of docs/planner.md; each `max` is a sum where nothing overlaps."""
    together = max if overlaps else (lambda computing, sending: computing + sending)
    last, total = options[-1], sum(option.optimizer_s for option in options)
    for number in range(num_backwards):
        gathers = [option.gather_again_s if number else option.gather_s for option in options]
        is_last = number == num_backwards - 1
        reductions = [option.reduce_s if is_last else option.reduce_early_s for option in options]
        total += gathers[0] + last.gather_backward_s + reductions[0]
        behind = zip(options, [*gathers[1:], 0], strict=True)
        total += sum(together(own.forward_s, own.forward_comm_s + gather_s) for own, gather_s in behind)
        ahead_s = [0, *(option.gather_backward_s for option in options[:-1])]
        around = zip(options, [*reductions[1:], 0], ahead_s, strict=True)
        total += sum(together(own.backward_s, own.backward_comm_s + red + ahead) for own, red, ahead in around)
    return total


def added_up(row, itemsize, num_rows):
    """New rows in a sum of pairs, and of pairs of pairs; of 16 bits in fp32, and then one in 16."""
    num_new = floor(log2(num_rows))
    return row * num_new if itemsize >= 4 else ceil(row / itemsize) * 4 * (num_new + 1)


class _Unit:
    def __init__(self, costs, name, cluster, num_backwards):
        self.costs = costs
        num_slices = int(name[6:-1]) if name.startswith("split") else 1
        within, base = cluster.num_ranks, name
        if name.startswith("hybrid"):
            inner = name[7:-1].split(", ")
            within, base = int(inner[0]), (inner[1] if len(inner) > 1 else "full")
        if num_slices > 1:
            base = "full"
        if within == 1 or base == "ddp":
            within, base = 1, "ddp"
        replicas, gloo = cluster.num_ranks // within, cluster.keeps_received_rows
        is_one_host = cluster.num_ranks <= cluster.ranks_per_host
        shares = cluster.inside.in_place is not None and (is_one_host or cluster.ranks_per_host % within == 0)
        shares, replicas_share = shares and within > 1, cluster.inside.in_place is not None and is_one_host
        self.within, self.owned_states = within, 0
        self.held = split_grads = gathered = moving = raw_large = raw_small = 0
        slice_use = slice_raw = num_sent = num_split = widest = row = converted = 0
        slice_grad = 0, 4
        converts, self.steps, self.in_rows, self.in_rows_temporaries = False, [], 0, 0
        for p in costs.params:
            shard = ceil(p.length / within) * p.index_numel
            self.held += shard * p.stored_itemsize
            if p.owner_work:
                self.owned_states += p.numel * p.state_bytes_per_element
            else:
                self.held += shard * p.state_bytes_per_element + (4 if p.state_bytes_per_element else 0)
                self.steps.append(shard * p.step_bytes_per_element)
            if not p.owner_work and p.grad_itemsize and p.numel > 1 and shard <= 1024:
                self.in_rows += 2 * shard * p.stored_itemsize
                self.in_rows_temporaries += shard * p.step_bytes_per_element
            casts = p.gather_itemsize != p.stored_itemsize
            once = shares and not (num_slices > 1 and p.can_split)
            self.held += shard * p.gather_itemsize * (once and (casts or p.numel == 1))
            casts = casts and not once
            moving += shard * p.gather_itemsize * casts * (gloo or within == 1)  # else within the rows
            if num_slices > 1 and p.can_split:
                part = within * ceil(ceil(p.length / within) / num_slices) * p.index_numel
                slice_use = max(slice_use, part * p.gather_itemsize * (within > 1 or casts))
                if p.grad_itemsize:
                    num_split += 1
                    slice_grad = max(slice_grad, ((part // within + FLAGS) * p.grad_itemsize, p.grad_itemsize))
                    slice_raw = max(slice_raw, part * p.gather_itemsize)
                    split_grads += shard * p.stored_itemsize
                continue
            whole = p.numel * p.gather_itemsize
            if once:
                pass
            elif within == 1:
                gathered += whole * casts
            elif gloo and whole >= 65536:
                gathered += ceil(whole / 256) * 256
            else:
                padded = within * shard * p.gather_itemsize
                gathered += ceil(padded / 256) * 256 + padded * gloo
            if p.grad_itemsize:
                num_sent, widest = num_sent + 1, max(widest, p.grad_itemsize)
                row += shard * p.grad_itemsize
                converted += shard * p.stored_itemsize
                converts |= p.grad_itemsize != p.stored_itemsize
                if whole > 65536:
                    raw_large = max(raw_large, whole)
                else:
                    raw_small += whole
        row += ceil(num_sent / FLAGS) * FLAGS * widest
        self.sent, self.grad = within * row, (converted if converts else row) + split_grads
        is_whole = base in ("zero1", "zero2")
        self.held += gathered if is_whole else 0
        self.use = 0 if is_whole else gathered + 2 * slice_use
        self.use_again = self.use if base == "keep" or costs.is_used_in_backward else 0
        moving += HEADER * (within + 1) * (gloo and within > 1)
        self.ahead = moving if is_whole else 0 if base == "ddp" else gathered + slice_use + moving
        self.kept = gathered if base == "keep" or (base == "full" and costs.is_used_throughout) else 0
        self.ahead_again = self.ahead - self.kept if base == "full" and costs.is_used_in_backward else 0
        received, self.sums, self.among, self.among_late = (row if within > 1 else 0), 0, 0, 0
        if gloo:
            received = (within - 1) * row * (not shares) + (HEADER * (within + 1) if within > 1 and row else 0)
            own = ceil(row / replicas)  # of a row that is all-reduced, each rank adds up a part, and holds the peers'
            self.among = (replicas - 1) * own + HEADER * (replicas + 1) if replicas > 1 else 0
            self.among_late = own + HEADER * (replicas + 1) if replicas > 1 and replicas_share else 0
            added = row if within > 1 else own
            self.sums = added_up(added, widest or 4, max(within, replicas))
        if within == 1:
            received, self.among, self.among_late = self.among, self.among_late, 0
        part, itemsize = slice_grad
        slice_flying, slice_sums = within * part, 0
        if within > 1 and part:
            slice_flying += (within - 1) * part * (not shares) + HEADER * (within + 1) if gloo else part
            slice_sums = added_up(part, itemsize, within) if gloo else 0
        uses = (gathered, 2 * slice_use) if self.use_again and not is_whole else (0, 0)
        self.filling = self.sent + raw_small + uses[0] + split_grads  # of reduced slices, from the first on
        beside = max(raw_large, uses[1] if num_split > 1 else 0)  # the next weight's slices are gathered beside one's
        self.slicing = self.filling + slice_flying + max(beside, slice_raw + slice_sums)
        self.filling += max(raw_large, uses[1], slice_raw)
        self.slice_flying = slice_flying
        self.flying = self.sent + received + slice_flying + split_grads
        self.resting = self.sent + split_grads
        self.sums = max(self.sums, slice_sums)
        self.waiting = self.sent if base == "zero1" and num_backwards > 1 else 0
