// Colours of conversations in the map and the lists: those that run at the same time have different ones while there are enough.

const PALETTE = ["#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#06b6d4", "#ec4899", "#84cc16", "#f97316", "#6366f1", "#14b8a6"];

/** What a row or a session has its colour by: a session keeps its own while it rests. */
export function ownerOf(row) {
  return row.session || row.id;
}

export class Colours {
  constructor() {
    this.taken = new Map(); // owner -> index in PALETTE
  }

  /** Give all owners of a view a colour, and take back those of owners that are gone. */
  take(view) {
    const owners = [...view.rows, ...view.queue, ...view.sessions].map(ownerOf);
    const there = new Set(owners);
    for (const owner of this.taken.keys()) if (!there.has(owner)) this.taken.delete(owner);
    const uses = PALETTE.map(() => 0);
    for (const index of this.taken.values()) uses[index] += 1;
    for (const owner of owners) {
      if (this.taken.has(owner)) continue;
      const index = uses.indexOf(Math.min(...uses));
      uses[index] += 1;
      this.taken.set(owner, index);
    }
  }

  of(owner) {
    return PALETTE[this.taken.get(owner) ?? 0];
  }
}
